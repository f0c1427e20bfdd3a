"""From kept channels to a smaller model."""
