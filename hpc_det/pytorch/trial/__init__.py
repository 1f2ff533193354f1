"""What users write and call: the trial, its context, callbacks and reducers."""
