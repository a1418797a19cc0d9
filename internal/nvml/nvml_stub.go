//go:build !(cgo && linux)

package nvml

import "fmt"

// Query says that there is no NVML in this build.
func Query(Options) (*Info, error) {
	return nil, fmt.Errorf("%w: built without cgo or not for Linux", ErrNotAvailable)
}
