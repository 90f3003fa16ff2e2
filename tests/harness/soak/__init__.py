"""A load that goes on for long at one pace, what it costs the server meanwhile, and a judge of whether that grew."""
