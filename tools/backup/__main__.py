from tools.backup.backup_command import main

main()
