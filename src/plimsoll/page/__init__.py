"""The page of a run.

Pure functions turn run directories into JSON. One HTML page shows the JSON: either live, from a
server, or frozen, with the JSON inside the file.
"""
