"""What there is to hold a run: cards, hosts, versions; by name, or as they are here."""
