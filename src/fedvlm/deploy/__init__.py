"""Between machines: kits with certificates and keys, and the processes of server and sites."""
