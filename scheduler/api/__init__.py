"""SchedulerService: protobuf messages in and out."""
