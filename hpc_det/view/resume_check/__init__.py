"""Whether a trial resumes exactly: two short trainings compared, and the cause of a difference."""
