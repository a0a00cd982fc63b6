from tools.forecast.forecast_command import main

main()
