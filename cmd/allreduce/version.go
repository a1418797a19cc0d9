package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"gpu.example/allreduce"
)

// abiVersion is AR_ABI_VERSION of csrc/include/allreduce.h; a test compares them, and a library whose own differs is
// refused when the program starts to use it.
const abiVersion = 1

// versionReport is the JSON of `allreduce version`.
type versionReport struct {
	Version    string           `json:"version"`
	ABI        int              `json:"abi"`
	SourceHash string           `json:"source_hash"` // of the C core; "" for a plain `go build`
	Backends   []versionBackend `json:"backends"`
	Go         string           `json:"go"`
	Platform   string           `json:"platform"`
	Warnings   []string         `json:"warnings"`
	OK         bool             `json:"ok"`
}

type versionBackend struct {
	Name    string `json:"name"`
	Runtime string `json:"runtime"` // version of the runtime linked: "13.0" of CUDA, the library's own where emulated
}

func newVersionCommand(s streams) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version, the backends compiled in and the runtimes linked",
		Args:  noArguments,
		RunE: func(*cobra.Command, []string) error {
			report := newVersionReport(allreduce.BuildInfo())
			if asJSON {
				return writeJSON(s.out, report)
			}
			fmt.Fprintf(s.out, "allreduce %s, ABI %d, %s, %s\n", report.Version, report.ABI, report.Go, report.Platform)
			for _, b := range report.Backends {
				fmt.Fprintf(s.out, "backend %s, runtime %s\n", b.Name, b.Runtime)
			}
			if report.SourceHash != "" {
				fmt.Fprintf(s.out, "C core built from sources %s\n", report.SourceHash)
			}
			for _, w := range report.Warnings {
				fmt.Fprintf(s.out, "warning: %s\n", w)
			}
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

func newVersionReport(build allreduce.Build) versionReport {
	r := versionReport{Version: allreduce.Version(), ABI: abiVersion, Go: runtime.Version(),
		Platform: runtime.GOOS + "/" + runtime.GOARCH, Backends: []versionBackend{}, Warnings: []string{}, OK: true}
	if build.SourceHash != 0 {
		r.SourceHash = fmt.Sprintf("%016x", build.SourceHash)
	}
	for _, b := range build.Backends {
		linked := r.Version
		if b == allreduce.BackendCUDA {
			linked = fmt.Sprintf("%d.%d", build.CUDARuntime/1000, build.CUDARuntime%1000/10)
		}
		r.Backends = append(r.Backends, versionBackend{Name: b.String(), Runtime: linked})
	}
	if len(r.Backends) == 0 {
		r.Warnings = append(r.Warnings, "no backend is compiled in: built without cgo, or not for Linux on amd64 or arm64")
	}
	return r
}
