"""The load line: what a run weighs, predicted, measured, explained."""
