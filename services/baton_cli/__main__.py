"""`python -m baton_cli`. The supervisor starts the services this way, so it need not find the console script."""

from baton_cli.main import main

main()
