"""What each tenant may use."""
