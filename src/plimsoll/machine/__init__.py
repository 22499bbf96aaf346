"""Hardware, memory and package versions: of known cards, or of the machine at hand."""
