"""The output of jobs and ranks: the lines of all logs as one stream, merged by time."""
