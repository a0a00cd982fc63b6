from tools.plan.plan_command import main

main()
