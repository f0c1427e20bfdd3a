"""What a network is run on: procedural images, random text, inverted images, a user's own."""
