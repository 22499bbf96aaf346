"""Write configs from the commands and scripts that start other trainers.

Nothing is executed: commands and scripts are only parsed. Each trainer's package fills the records
of `foreign`. `writer` turns the records into a config.
"""
