"""What jobs and ranks printed: the lines of all logs as one stream, merged by time."""
