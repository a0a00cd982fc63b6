from tools.reference.pages import main

main()
