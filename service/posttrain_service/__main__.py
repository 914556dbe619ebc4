"""`python -m posttrain_service` is the command `posttrain`."""

from posttrain_service.cli.main import main

if __name__ == "__main__":
    main()
