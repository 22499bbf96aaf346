"""What a role learns, one file each: a forward of one micro-batch, and its share of the loss.

An objective is a frozen dataclass that crosses to the ranks with every step; with it goes, for
every micro-batch, a stream: what a micro-batch carries besides its tokens. To add one: a file
here, and `Worker.train` takes it.
"""
