"""The handlers of requests, one module per group of APIs. Each module lists APIs and versions."""
