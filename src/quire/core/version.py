"""The version, for what must not import the public names."""

VERSION = "0.1.0"
