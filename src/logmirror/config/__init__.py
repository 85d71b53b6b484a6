"""The configuration: one YAML file and the environment in, frozen settings out.

`settings` is the door. Behind it: `problems` says what can be wrong and where, `files` reads bytes,
`source` turns text into values that know their place, `model` is the shape and `scalars` are its
single values, `rules`, `kafka_rules` and `s3_rules` find everything that is wrong, `values` reads
what may be wrong, `suggestions` guesses what was meant, `schema` describes the shape to other
programs. `environment` is what the process's own variables set.
"""
