"""Keys in memory that is cheaper than the device's."""
