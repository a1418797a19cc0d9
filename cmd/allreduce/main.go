// Command allreduce runs checked reductions over the GPUs of this machine, or over emulated ones, and tells what the
// library would do and why. One file per sub-command.
//
// Exit codes: 0 good, 1 a finding (ranks that differ, wrong elements), 2 could not run.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"unicode"

	"github.com/spf13/cobra"
)

// commands is the table of sub-commands, in the order the help shows them.
var commands = []func(streams) *cobra.Command{
	newRunCommand,
	newPerfCommand,
	newSoakCommand,
	newPerfChildCommand,
	newProbeCommand,
	newProbeChildCommand,
	newEnvCommand,
	newVersionCommand,
}

// The exit codes of every sub-command.
const (
	exitGood    = 0
	exitFinding = 1
	exitFailed  = 2
)

// errFinding ends a command that ran and found something; what it found is printed already.
var errFinding = errors.New("a finding")

// streams is where a command writes: results to out, everything else to err.
type streams struct {
	out, err io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // the second signal ends the program at once
	os.Exit(execute(ctx, os.Args[1:], streams{out: os.Stdout, err: os.Stderr}))
}

// execute runs one command line and gives the exit code. Every failure is one line on the error stream.
func execute(ctx context.Context, args []string, s streams) int {
	root := newRootCommand(s)
	root.SetArgs(args)
	command, err := root.ExecuteContextC(ctx)
	switch {
	case err == nil:
		return exitGood
	case errors.Is(err, errFinding):
		return exitFinding
	}
	fmt.Fprintf(s.err, "%s: %s\n", command.CommandPath(), oneLine(err))
	return exitFailed
}

func newRootCommand(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "allreduce",
		Short: "Sum tensors over the GPUs of one machine, and see which path they took",
		Long: `Sum tensors over the GPUs of one machine, and see which path they took.

A machine without a GPU runs the same code on emulated devices; their times are simulated and marked so.

Exit codes: 0 good, 1 a finding (ranks that differ, wrong elements), 2 could not run.`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cmd.SetOut(s.err)
			_ = cmd.Help()
			return errors.New("name a sub-command")
		},
	}
	root.SetOut(s.out)
	root.SetErr(s.err)
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return fmt.Errorf("%w (%s --help lists the flags)", err, cmd.CommandPath())
	})
	for _, make := range commands {
		root.AddCommand(make(s))
	}
	return root
}

// noArguments refuses positional arguments, which no sub-command takes.
func noArguments(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case cmd.HasSubCommands():
		var names []string
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() {
				names = append(names, sub.Name())
			}
		}
		return fmt.Errorf("%q is no sub-command; allowed: %s", args[0], strings.Join(names, ", "))
	}
	return fmt.Errorf("takes no arguments, only flags; got %q", args[0])
}

// oneLine is an error for people: without the library's own prefix, which the command's name replaces, and without the
// control characters that a file's name may bring along.
func oneLine(err error) string {
	text := strings.ReplaceAll(": "+err.Error(), ": allreduce: ", ": ")
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return '?'
		}
		return r
	}, strings.ReplaceAll(text[len(": "):], "\n", "; "))
}
