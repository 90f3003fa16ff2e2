"""Several server processes on one port: the supervisor, its workers, and the port that they share."""
