package oncehttp

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDocsNameTestsThatExist: a sentence that no test holds is a wish.
func TestDocsNameTestsThatExist(t *testing.T) {
	var code strings.Builder
	for _, pattern := range []string{"*_test.go", "store/*/*_test.go", "examples/*/*_test.go"} {
		names, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, name := range names {
			b, err := os.ReadFile(name)
			require.NoError(t, err)
			code.Write(b)
		}
	}
	page, err := os.ReadFile("docs/what-survives.md")
	require.NoError(t, err)
	named := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(string(page), -1)
	require.Greater(t, len(named), 10)
	for _, m := range named {
		require.Contains(t, code.String(), "func "+m[1]+"(", "docs/what-survives.md")
	}
}
