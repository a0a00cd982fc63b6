from services.tool_loop.cli import main

main()
