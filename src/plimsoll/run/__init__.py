"""What a run writes, shows and needs to resume; no torch is imported here."""
