"""Measurements of a compressed model beside its source: passports and quality-versus-size charts."""
