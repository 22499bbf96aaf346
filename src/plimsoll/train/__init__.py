"""Everything around the loop of a job: data, session, reference, updates and saving."""
