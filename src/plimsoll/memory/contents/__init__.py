"""What every process, card and host of a run holds, where and when."""
