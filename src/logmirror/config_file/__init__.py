"""One configuration file: its text, its shape, its rules, its schema.

`logmirror.config` is the door. Behind it: `problems` says what can be wrong and where, `files`
reads bytes, `source` turns text into values that know their place, `model` is the shape and
`scalars` are its single values, `rules` and `kafka_rules` find everything that is wrong, `values`
reads what may be wrong, `suggestions` guesses what was meant, `schema` describes the shape to other
programs.
"""
