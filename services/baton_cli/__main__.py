"""`python -m baton_cli`: how the supervisor starts the services, whatever the console script is called."""

from baton_cli.main import main

main()
