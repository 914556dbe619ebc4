"""Loading Hugging Face models, adapters, sharding and memory: what turns arguments into a module that trains."""
