"""A command with an option."""

from hybridflow.core import Command, CommandCapabilities


class Greet(Command):
    capabilities = CommandCapabilities(summary="Say good day to somebody.")

    def add_arguments(self, parser):
        parser.add_argument("--whom", default="world", help="who is greeted")

    def run(self, arguments):
        print(f"good day, {arguments.whom}")
        return 0
