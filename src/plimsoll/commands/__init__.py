"""What the command line does besides training: plan, doctor, eval, export, report and others."""
