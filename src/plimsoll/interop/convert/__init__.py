"""Write configs from the commands and scripts that start other trainers.

Nothing is executed: commands and scripts are only read. Each trainer's package fills the record of
`foreign`; `writer` turns the record into a config.
"""
