"""Hardware, memory and package versions, of known cards or of this machine."""
