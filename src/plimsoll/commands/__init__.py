"""The commands besides training: plan, doctor, eval, export, report and others."""
