"""What a scheduler tells about its site, as a cluster profile: one scheduler a file, and the profile's text."""
