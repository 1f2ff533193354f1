"""The configuration: its layers are read, composed, merged and validated, and the layer of each value is recorded."""
