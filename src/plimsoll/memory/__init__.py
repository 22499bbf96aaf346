"""The load line: what a run weighs, predicted, measured, explained. Only trace.py needs torch."""
