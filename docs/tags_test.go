//go:build !cuda

package docs

// tags are the build tags of this test, for the programs it builds.
var tags []string
