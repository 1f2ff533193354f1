"""What of all that hpc_det can use a site has, and a remedy for each thing it lacks: one subject a file.

Nothing is changed or submitted. Commands are asked all at once, each with a time limit, and what they answer may be
anything.
"""
