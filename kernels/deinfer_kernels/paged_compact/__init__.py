"""Copy of scattered pages into a dense buffer."""
