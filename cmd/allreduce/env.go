package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"gpu.example/allreduce"
)

// envReport is the JSON of `allreduce env`.
type envReport struct {
	Variables []envVariable `json:"variables"`
	Warnings  []string      `json:"warnings"`
	OK        bool          `json:"ok"`
}

type envVariable struct {
	Name    string `json:"name"`
	Value   string `json:"value"` // "" where it is not set
	Default string `json:"default"`
	Allowed string `json:"allowed"`
	Meaning string `json:"meaning"`
	Field   string `json:"config_field"`
	NotYet  string `json:"not_yet,omitempty"`
}

func newEnvCommand(s streams) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "env",
		Short: "List the environment variables: value now, default, what is allowed",
		Long: `List the environment variables the library reads: value now, default, what is allowed, meaning.

It shows values as they are; "allreduce run" checks them.`,
		Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			report := envReport{Warnings: []string{}, OK: true}
			for _, v := range allreduce.Variables() {
				report.Variables = append(report.Variables, envVariable{Name: v.Name, Value: os.Getenv(v.Name),
					Default: v.Default, Allowed: v.Allowed, Meaning: v.Help, Field: v.Field, NotYet: v.NotYet})
			}
			if asJSON {
				return writeJSON(s.out, report)
			}
			for _, v := range report.Variables {
				state := "not set"
				if v.Value != "" {
					state = fmt.Sprintf("set to %q", v.Value)
				}
				fmt.Fprintf(s.out, "%s (%s, default %s)\n", v.Name, state, v.Default)
				fmt.Fprintf(s.out, "    %s\n    allowed: %s\n", v.Meaning, v.Allowed)
				if v.NotYet != "" {
					fmt.Fprintf(s.out, "    no effect yet: %s\n", v.NotYet)
				}
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}
