"""What is told about single requests: log lines, and spans for OpenTelemetry."""
