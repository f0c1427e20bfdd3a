"""What a network is made of: units of channels, the layers around them, their weights."""
