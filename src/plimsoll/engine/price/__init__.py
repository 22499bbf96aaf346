"""What a role holds on one training rank, reckoned without torch."""
