"""Keys, certificates and enrolment of sites."""
