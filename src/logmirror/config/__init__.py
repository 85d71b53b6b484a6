"""The configuration: one YAML file and the environment in, frozen settings out.

Other packages use `settings`, which has `load` and `load_text`, and `environment`, which reads the
process's variables. The other modules:

- `files` reads bytes; `source` parses YAML into values with line and column; `problems` has the
  types in which problems are reported.
- `model` is the shape of the file, with `base_model`, `layout_model`, `destination_model` and, for
  single values, `scalars`.
- `rules`, `kafka_rules` and `s3_rules` report all problems; `values` reads values that may be
  invalid; `suggestions` proposes corrections.
- `destinations` has the destinations of `settings`, `broker_model` the section of the embedded
  broker, and `addresses` what that section shares with the broker's options.
- `schema` generates the JSON Schema.
"""
