"""Convert commands of OpenRLHF 0.8.0 to 0.11.2."""
